"""How good a finished run is: beside baselines, without one of its features, on parts of the rows."""
