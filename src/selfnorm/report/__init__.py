"""Figures and tables of runs and measurements. Training does not need them; matplotlib and pillow are imported on first use."""
