"""Scores of a model: perplexity, decoding and BLEU."""
