"""The machines that a plan is made for: a description, and a catalogue of described ones."""
