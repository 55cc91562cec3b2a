"""Evaluating trained flows: exact likelihoods, the quality of their learned inverses, and fast sampling."""
