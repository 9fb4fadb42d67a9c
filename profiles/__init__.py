"""Measured latencies of one model, GPU and SGLang version."""
