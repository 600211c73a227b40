"""Models over sequences of events: layers, jagged in and jagged out."""
