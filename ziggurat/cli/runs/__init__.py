"""Verbs that ask a finished run: scores, metrics, importance, what its tables take and lose in few bits."""
