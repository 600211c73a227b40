"""Many runs and their statistics: comparisons, searches of settings, laws of scaling, a first model for a table."""
