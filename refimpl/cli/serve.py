"""``refimpl serve``. Must not know: HTTP. Called by: __main__."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from refimpl.cli.flags import RankTimeout, RankTransport, tell, with_options
from refimpl.cli.run import ArithmeticName, Device, Dtype
from refimpl.config import ConfigError, require_choice
from refimpl.run.options import Options

MODEL, SERVER = "Model", "Server"

ZmqPort = Annotated[
    int | None,
    typer.Option(
        min=0, max=65535, help="take requests over ZMQ too; 0: a free port", rich_help_panel=SERVER
    ),
]
KvEventsJson = Annotated[
    str | None,
    typer.Option(
        help='{"publisher": "zmq"} publishes what is cached where', rich_help_panel=SERVER
    ),
]
LoadEndpoint = Annotated[
    str,
    typer.Option(
        help="off, auto (behind KV events) or tcp://*:PORT: publishes the load there",
        rich_help_panel=SERVER,
    ),
]
ModelPath = Annotated[
    str | None,
    typer.Option(
        help="tiny-gqa (the default), tiny-mla, smollm2, a .gguf file or a Hugging Face folder",
        rich_help_panel=MODEL,
    ),
]
ServedName = Annotated[
    str | None, typer.Option(help="default: --model-path", rich_help_panel=MODEL)
]
Hands = Annotated[
    str,
    typer.Option(
        help="torch: a real model; none: no model, the simulator's timing (--model, --hardware)"
        " and made-up answers",
        rich_help_panel=MODEL,
    ),
]
Host = Annotated[str, typer.Option(help="address", rich_help_panel=SERVER)]
Port = Annotated[int, typer.Option(help="port; 0: any free one", rich_help_panel=SERVER)]
ApiKey = Annotated[str | None, typer.Option(help="asked of every request", rich_help_panel=SERVER)]
AdminKey = Annotated[
    str | None, typer.Option(help="asked of the admin API", rich_help_panel=SERVER)
]
StrictAdmin = Annotated[
    bool,
    typer.Option(
        "--strict-admin", help="no admin API without an admin key", rich_help_panel=SERVER
    ),
]
NoAttachRollback = Annotated[
    bool,
    typer.Option(
        "--no-attach-rollback",
        help="where a rank of --dp-size fails to attach or detach, leave the others as they are now",
        rich_help_panel=SERVER,
    ),
]

NOT_OF_A_SERVER = (
    *("workload", "trace", "trace_format", "limit"),
    *("instances", "router_policy", "cache_only", "fault_seed"),
)


@partial(with_options, hidden=NOT_OF_A_SERVER)
def serve(
    options: Options,
    model_path: ModelPath = None,
    served_model_name: ServedName = None,
    arithmetic: ArithmeticName = "fast",
    dtype: Dtype = "auto",
    device: Device = "auto",
    hands: Hands = "torch",
    rank_transport: RankTransport = "thread",
    rank_timeout: RankTimeout = 5.0,
    host: Host = "127.0.0.1",
    port: Port = 30000,
    zmq_port: ZmqPort = None,
    kv_events_config: KvEventsJson = None,
    load_publish_endpoint: LoadEndpoint = "off",
    api_key: ApiKey = None,
    admin_api_key: AdminKey = None,
    strict_admin: StrictAdmin = False,
    no_attach_rollback: NoAttachRollback = False,
) -> None:
    """Serve a model over HTTP, with OpenAI's API, SGLang's own and the admin API of L3."""
    require_choice("--hands", hands, ("torch", "none"))
    try:
        from refimpl.serve.admin import Keys
        from refimpl.serve.app import build_app, listening
        from refimpl.serve.app import serve as serve_app
        from refimpl.serve.companions import Sockets, companions_of

        if hands == "none":
            from refimpl.serve.start_null import start_null_service

            if model_path is not None:
                tell(
                    [
                        f"--model-path is the name alone: the timing is that of --model {options.model}"
                    ]
                )
            service = start_null_service(options, served_model_name or model_path)
        else:
            from refimpl.run.model_choice import ModelChoice
            from refimpl.run.rank_setup import RankChoice
            from refimpl.serve.start import start_service

            choice = ModelChoice(model_path or "tiny-gqa", arithmetic, dtype, device)
            ranks = RankChoice(rank_transport, rank_timeout)
            service = start_service(options, choice, served_model_name, ranks)
    except ImportError as error:
        extras = "serve" if hands == "none" else "serve,torch,kernels"
        raise ConfigError(f"serve needs {error.name}: pip install -e '.[{extras}]'") from None
    service.changes.rolls_back = not no_attach_rollback
    keys = Keys(api_key, admin_api_key, strict=strict_admin)
    with listening(host, port) as listener:
        sockets = Sockets(host, zmq_port, kv_events_config, load_publish_endpoint)
        companions = companions_of(service, keys, sockets)
        place = f"serving {service.name} on http://{host}:{listener.getsockname()[1]}"
        said = "\n".join([place, *map(str, companions)])
        serve_app(build_app(service, keys, companions), listener, said)
    if service.ranks.error is not None:  # which was logged when it happened
        raise typer.Exit(1)
