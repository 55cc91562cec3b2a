"""Training: the step, the loop around it, and the files of a run."""
