"""Rankers that read one history of events beside the fields of a sample: BST, DIEN, TransAct, RankMixer, OneTrans."""
