"""An OpenAI-compatible server: the one of `transformers serve`, with a loader for models that are not part of transformers.

    pip install "transformers[serving]"
    python -m examples.serve CKPT --port 8000
    curl localhost:8000/v1/chat/completions -H "Content-Type: application/json" \
        -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}'

`transformers serve` 5.24 looks a model's class up in its own namespace and its modality in tables of its own class names.
Both questions are answered here by the Auto classes; everything else, streaming included, is transformers' own. One request
is answered at a time. CKPT is a folder in the released layout or one that `convert hub` wrote.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging
from transformers.utils.import_utils import is_serve_available

import modeling_dsv4  # noqa: F401  (registers the models)
import processing_dsv4  # noqa: F401  (registers the processor)
from examples.demo import given_or_own
from examples.image_demo import positive


def build_app(folder: Path, *, thinks: bool = False, trust_remote_code: bool = False):
    r"""Return the FastAPI application that serves one folder; the model is loaded.

    Args:
        folder (`Path`): V4.1, or V4 that `convert hub` wrote.
        thinks (`bool`, *optional*, defaults to `False`): whether a chat thinks if the request does not say.
        trust_remote_code (`bool`, *optional*, defaults to `False`): whether code in the folder may run, which V4 asks for.

    Raises:
        OSError: if what a server needs is not installed.
    """
    if not is_serve_available():
        raise OSError('the server needs fastapi, uvicorn and openai; pip install "transformers[serving]"')
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.server import build_server
    from transformers.cli.serving.systemone import SystemOneHandler
    from transformers.cli.serving.transcription import TranscriptionHandler
    from transformers.cli.serving.utils import GenerationState, Modality

    class Manager(ModelManager):
        """Loads through the Auto classes, which know registered and remote code."""

        def _load_model(self, model_id_and_revision, *args, **kwargs):
            config = AutoConfig.from_pretrained(model_id_and_revision, trust_remote_code=trust_remote_code)
            has_images = getattr(config, "vision_config", None) is not None
            door = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
            options = {"dtype": self.dtype, "device_map": self.device, "trust_remote_code": trust_remote_code}
            return door.from_pretrained(model_id_and_revision, **options).eval()

        @staticmethod
        def get_model_modality(model, processor=None):
            return Modality.VLM if "image" in model.input_modalities else Modality.LLM

    device = "auto" if torch.cuda.is_available() else "cpu"
    manager = Manager(device=device, trust_remote_code=trust_remote_code, force_model=str(folder))
    state = GenerationState()
    chat = {"chat_template_kwargs": {"enable_thinking": thinks}}
    return build_server(
        manager,
        ChatCompletionHandler(manager, state, **chat),
        completion_handler=CompletionHandler(manager, state),
        response_handler=ResponseHandler(manager, state, **chat),
        transcription_handler=TranscriptionHandler(manager, state),
        systemone_handler=SystemOneHandler(manager, state, **chat),
        generation_state=state,
    )


def main(argv: list[str] | None = None) -> int:
    """Serve until interrupted; 1 when the folder is no checkpoint or something is not installed."""
    parser = argparse.ArgumentParser(prog="python -m examples.serve", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", metavar="CKPT", help="folder (default: the demo's own, noise)")
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=positive, default=8000, metavar="N", help="default: 8000")
    parser.add_argument("--think", action="store_true", help="chats think before they answer")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that lies in CKPT (V4 needs it)")
    arguments = parser.parse_args(argv)
    logging.disable_progress_bar()
    try:
        folder = given_or_own(arguments.checkpoint)
        app = build_app(folder, thinks=arguments.think, trust_remote_code=arguments.trust_remote_code)
    except (OSError, ValueError) as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1
    import uvicorn

    uvicorn.run(app, host=arguments.host, port=arguments.port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
