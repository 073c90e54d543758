# SPDX-License-Identifier: Apache-2.0
"""`transformers serve` with K and V in kvqd.

    python -m kvq.transformers.serve MODEL [--kvq-format FORMAT] [options of transformers serve]

The server's own code keeps no cache from one request to the next. Here a request begins with what
kvqd has of its prompt: a chat's next turn computes what is new in it, and chats with the same
system prompt share that.
"""
from __future__ import annotations

import argparse
import sys
from typing import List, NoReturn, Optional, Sequence, Tuple

from . import attach
from .table import refuse

REFUSED = {  # of transformers serve, and why
    "--continuous-batching": "it keeps K and V in pages of its own",
    "--attn-implementation": "attention is kvq's here",
    "--compile": "it asks for a static cache",
}


def parse(words: Sequence[str]) -> Tuple[argparse.Namespace, List[str]]:
    """Options of ours, and what goes to transformers serve."""
    parser = argparse.ArgumentParser(
        prog="python -m kvq.transformers.serve", allow_abbrev=False,
        description="transformers serve, with the KV caches of its models in kvqd. Each request "
                    "has a session, and begins with what kvqd has of its prompt.",
        epilog="All other arguments go to `transformers serve`, whose --help lists them. Models "
               "are put on the CPU. Where KVQ_RUNTIME_DIR names no daemon and none runs, one is "
               "started that ends with the server.")
    parser.add_argument("--kvq-format", metavar="FORMAT", default="oscar4",
                        help="of K and V: oscar4 unless said, 16bit for the model's own precision")
    parser.add_argument("--kvq-attention", choices=("default", "exact", "fast"), default="default",
                        help="the path of attention; default: as the daemon is configured")
    parser.add_argument("--kvq-namespace", metavar="NAME",
                        help="whose quota the sessions count against, and who shares prefixes")
    parser.add_argument("--kvq-no-reuse", action="store_true",
                        help="compute every prompt from its first token on; for formats that "
                             "cannot share prefixes")
    ours, rest = parser.parse_known_args(words)
    for word in rest:
        name = word.split("=", 1)[0]
        if name in REFUSED:
            parser.error(f"{name} cannot be used with kvq: {REFUSED[name]}; leave it out")
    if not any(word.split("=", 1)[0] == "--device" for word in rest):
        rest += ["--device", "cpu"]
    return ours, rest


def prepare(ours: argparse.Namespace) -> None:
    """Every model that the server loads attends by kvq and is attached."""
    try:
        from transformers.cli.serving.model_manager import ModelManager
        plain = ModelManager._load_model
    except (ImportError, AttributeError) as error:
        refuse(f"this transformers has another server than the one that kvq knows, of 5.23 "
               f"({error}); install 'transformers[serving]==5.23.*'")

    def load(manager, *arguments, **options):
        manager.attn_implementation = "kvq"
        model = plain(manager, *arguments, **options)
        attach(model, ours.kvq_format, reuse=False if ours.kvq_no_reuse else None,
               attention=ours.kvq_attention, namespace=ours.kvq_namespace)
        return model

    setattr(ModelManager, "_load_model", load)


def main(words: Optional[Sequence[str]] = None) -> NoReturn:
    """Serves until it is told to end."""
    ours, rest = parse(sys.argv[1:] if words is None else words)
    try:
        prepare(ours)
    except NotImplementedError as error:
        sys.exit(str(error))
    from transformers.cli.transformers import app
    app(args=["serve", *rest], prog_name="python -m kvq.transformers.serve")
    sys.exit(0)


if __name__ == "__main__":
    main()
