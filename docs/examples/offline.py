"""`sgl.Engine` with PIC, no server: `python offline.py MODEL_FOLDER [cpu]`."""

import sys

import sglang as sgl

PASSAGES = [
    "Copper conducts electricity well and turns green in the rain. " * 8,
    "Cork floats because it is full of small closed cells of air. " * 8,
]


def main(model: str, *device: str) -> None:
    """Generate twice over the same passages in another order."""
    options = {"device": device[0], "max_total_tokens": 4096} if device else {}
    engine = sgl.Engine(
        model_path=model, enable_pic=True, pic_delimiter="<|chunk|>", pic_n_avg=8, **options
    )
    try:
        for order in (PASSAGES, PASSAGES[::-1]):
            prompt = "<|chunk|>".join(["Answer briefly.", *order, "What floats?"])
            answer = engine.generate(prompt, {"max_new_tokens": 8, "temperature": 0})
            report = answer["meta_info"]["pic"]
            print(report["outcome"], report["reused_tokens"] + report["recomputed_tokens"])
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
