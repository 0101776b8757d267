"""Evaluating a checkpoint: perplexity, loss by position, sampled text, reports.."""
