"""The quality lab: what recomputation regains of what reuse loses, in task scores."""
