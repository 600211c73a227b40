"""Parts of the benchmark `tables`: bytes of formats and caches, and what they cost in AUC."""
