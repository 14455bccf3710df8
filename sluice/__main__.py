"""The command line: `sluice …` or `python -m sluice …`."""

import sys
from importlib import import_module
from types import ModuleType

import typer

from service_kit.errors import SluiceError, UnauthenticatedError
from sluice.console import say
from sluice.errors import UserError

_COMMANDS = {
    "up": "up_command",
    "demo": "demo_command",
    "generate": "generate_command",
    "chat": "chat_command",
    "status": "status_command",
    "migrate": "migrate_command",
    "usage": "usage_command",
    "audit": "audit_command",
    "workers": "workers_command",
    "queue": "queue_command",
}
_GROUPS = ("models", "tenants", "keys", "quotas", "generations", "dead-letters")
_MODULES = {"chat": "generate", "dead-letters": "dead_letters"}
"""Where a command lies when its module has another name."""


def build_app(arguments: list[str]) -> typer.Typer:
    """The application, with the command that `arguments` name; with all of them when they name none.

    A command's module is loaded only when it is wanted: those that start the stack or talk gRPC take a second to load.
    """
    app = typer.Typer(
        help="Self-hosted LLM inference whose streams always continue at the next token.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(lambda: None)  # with one command alone, typer would take its name for an argument
    named = next((argument for argument in arguments if not argument.startswith("-")), None)
    is_known = named in _COMMANDS or named in _GROUPS
    for name, function in _COMMANDS.items():
        if name == named or not is_known:
            module = _module(name)
            app.command(name, epilog=getattr(module, f"{name.upper()}_EXAMPLES", None))(getattr(module, function))
    for name in _GROUPS:
        if name == named or not is_known:
            app.add_typer(_module(name).app, name=name)
    return app


def main() -> None:
    """Run one command. What the person can act on is one line on stderr and exit code 1; only a bug shows a traceback."""
    try:
        build_app(sys.argv[1:])()
    except UnauthenticatedError as error:
        say(f"error: {error.message}; give a key with --api-key or SLUICE_API_KEY")
    except SluiceError as error:
        say(f"error: {error.reason}: {error.message}")
    except UserError as error:
        say(f"error: {error}")
    else:
        return
    sys.exit(1)


def _module(name: str) -> ModuleType:
    return import_module(f"sluice.commands.{_MODULES.get(name, name)}")


if __name__ == "__main__":
    main()
