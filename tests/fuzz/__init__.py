"""Random files, options and damage for the command, and the property that holds for all of them."""
