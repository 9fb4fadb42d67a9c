"""Position-independent KV caching for SGLang.

The package is inert until a server is started with `--enable-pic`; see `sglang_ext.plugin`.
"""

__version__ = "0.1.0"
