"""`dcpjax serve MODEL`: a server that speaks OpenAI's API."""

from importlib.util import find_spec

from dcpjax.api.config import EngineConfig
from dcpjax.cli.flags import Flags, Parser, add_options
from dcpjax.cli.model_flags import ModelArguments, add_model_flag
from dcpjax.cli.verbosity import Verbosity, add_verbosity_flags, print_stderr
from dcpjax.server.options import ServeOptions

NEEDED = ("starlette", "uvicorn", "h11", "prometheus_client")


def add_flags(parser: Parser) -> None:
    add_model_flag(parser)
    add_options(parser, "the server", ServeOptions)
    add_verbosity_flags(parser)
    add_options(parser, "running the model", EngineConfig, leave_out=["hf_overrides"])


def run(flags: Flags) -> int:
    """Serve until SIGTERM or Ctrl-C, which end with exit code 0 when all has been answered or ended."""
    options = ServeOptions.from_options(flags.options(ServeOptions))
    model = ModelArguments(
        model=_model(flags),
        engine=flags.options(EngineConfig),
        sampling={},
        verbosity=Verbosity.from_flags(flags),
    )
    EngineConfig.from_options(model.engine)
    check_extra()
    return _serve(model, options)


def _serve(arguments: ModelArguments, options: ServeOptions) -> int:
    from dcpjax.server import serve
    from dcpjax.server.service import Service

    listening = serve.bind(options)  # before the model is read: a port in use is found at once
    service = Service(arguments.open(), options, model=arguments.model)
    url = serve.address(options, listening)
    serve.serve(service, listening, started=lambda: print_stderr(f"dcpjax: serving {service.names[0]} at {url}"))
    return 0


def check_extra() -> None:
    """Raise ValueError if a package of the extra is not installed."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ValueError(f"serve must have {missing[0]}, but it is not installed; pip install 'dcpjax[serve]'")


def _model(flags: Flags) -> str:
    named = [*flags.positionals, *filter(None, [flags.get("model")])]
    if len(named) != 1:
        has = f"more: {', '.join(named[:3])}" if named else "none"
        raise ValueError(f"serve must have one model, but has {has}; use dcpjax serve MODEL")
    return named[0]
