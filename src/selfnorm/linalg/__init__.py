"""Linear algebra of dense and convolutional maps: matrices, blocks, factorisations and iterations."""
