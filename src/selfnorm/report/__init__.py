"""Figures and tables from what runs leave behind. Nothing here is needed to train; matplotlib and pillow load on first use."""
