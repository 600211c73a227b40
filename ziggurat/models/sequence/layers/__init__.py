"""Layers over sequences of events: HSTU and STU, SASRec, LiGR, and how to compute histories once."""
