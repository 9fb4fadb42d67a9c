"""Thin command lines over the package; each module has `main(argv) -> int`."""
