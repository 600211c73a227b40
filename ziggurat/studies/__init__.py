"""Many runs and their statistics: comparisons of models, laws of scaling."""
