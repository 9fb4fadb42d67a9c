"""Making reused KV right for its new place: which tokens to recompute, how keys are re-encoded."""
