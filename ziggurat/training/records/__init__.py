"""Records: the files that a run writes into its folder, and what proves them whole."""
