"""What to do with a request, in time: pure decisions, no torch, no clock, no environment."""
