"""SGLang on an ordinary x86-64 CPU: platform, attention backend, float32 rotary.

Serves without SGLang's own CPU kernels. Independent of PIC: it works, and speeds up prefix
hits, on a server started without `--enable-pic`. Found by SGLang through the entry point of the
separate `sglang-pic-cpu` distribution in `dist/`, because SGLang ignores every plugin of a
distribution that ships a platform other than the selected one.
"""
