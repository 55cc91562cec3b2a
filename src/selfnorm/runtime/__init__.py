"""What everything rests on: checks, files, precision, CUDA streams and graphs. Knows no layer and no flow."""
