"""``refimpl serve``. Must not know: HTTP. Called by: __main__."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated

import typer

from refimpl.cli.flags import with_options
from refimpl.cli.run import ArithmeticName, Device, Dtype
from refimpl.config import ConfigError, require_choice
from refimpl.run.options import Options

SERVER = "Server"


NOT_OF_A_SERVER = (
    *("workload", "trace", "trace_format", "limit"),
    *("instances", "router_policy", "cache_only", "fault_seed"),
)


@partial(with_options, hidden=NOT_OF_A_SERVER)
def serve(
    options: Options,
    model_path: Annotated[
        str | None,
        typer.Option(
            help="tiny-gqa (the default), tiny-mla, smollm2, a .gguf file or a Hugging Face folder",
            rich_help_panel="Model",
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="default: --model-path", rich_help_panel="Model")
    ] = None,
    arithmetic: ArithmeticName = "fast",
    dtype: Dtype = "auto",
    device: Device = "auto",
    hands: Annotated[
        str,
        typer.Option(
            help="torch: a real model; none: no model, the simulator's timing (--model, --hardware)"
            " and made-up answers",
            rich_help_panel="Model",
        ),
    ] = "torch",
    host: Annotated[str, typer.Option(help="address", rich_help_panel=SERVER)] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="port; 0: any free one", rich_help_panel=SERVER)
    ] = 30000,
    api_key: Annotated[
        str | None, typer.Option(help="asked of every request", rich_help_panel=SERVER)
    ] = None,
    admin_api_key: Annotated[
        str | None, typer.Option(help="asked of the admin API", rich_help_panel=SERVER)
    ] = None,
    strict_admin: Annotated[
        bool,
        typer.Option(
            "--strict-admin", help="no admin API without an admin key", rich_help_panel=SERVER
        ),
    ] = False,
) -> None:
    """Serve a model over HTTP, with OpenAI's API, SGLang's own and the admin API of L3."""
    require_choice("--hands", hands, ("torch", "none"))
    try:
        from refimpl.serve.admin import Keys
        from refimpl.serve.app import build_app, listening
        from refimpl.serve.app import serve as serve_app

        if hands == "none":
            from refimpl.serve.start_null import start_null_service

            service = start_null_service(options, served_model_name or model_path)
        else:
            from refimpl.run.real import ModelChoice
            from refimpl.serve.start import start_service

            choice = ModelChoice(model_path or "tiny-gqa", arithmetic, dtype, device)
            service = start_service(options, choice, served_model_name)
    except ImportError as error:
        raise ConfigError(
            f"serve needs {error.name}: pip install -e '.[serve,torch,kernels]'"
        ) from None
    app = build_app(service, Keys(api_key, admin_api_key, strict=strict_admin))
    with listening(host, port) as listener:
        place = f"http://{host}:{listener.getsockname()[1]}"
        print(f"serving {service.name} on {place}", file=sys.stderr, flush=True)
        serve_app(app, listener)
