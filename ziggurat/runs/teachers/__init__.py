"""Teachers: log the scores of a trained run, and let other runs learn from them."""
