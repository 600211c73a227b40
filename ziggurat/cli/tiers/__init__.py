"""Verbs about what tables of embeddings take and where they lie."""
