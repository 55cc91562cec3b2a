"""What a flow is worth: exact likelihoods, the health of its learned inverses, fast samples."""
