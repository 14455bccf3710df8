"""The command line: `sluice …` or `python -m sluice …`."""

import sys

import typer

from service_kit.errors import SluiceError, UnauthenticatedError
from sluice.commands import demo, generate, keys, migrate, models, status, up
from sluice.console import say
from sluice.errors import UserError

app = typer.Typer(
    help="Self-hosted LLM inference whose streams always continue at the next token.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("up")(up.up_command)
app.command("demo")(demo.demo_command)
app.command("generate")(generate.generate_command)
app.command("chat")(generate.chat_command)
app.command("status")(status.status_command)
app.command("migrate")(migrate.migrate_command)
app.add_typer(models.app, name="models")
app.add_typer(keys.app, name="keys")


def main() -> None:
    """Run one command. What the person can act on is one line on stderr and exit code 1; only a bug shows a traceback."""
    try:
        app()
    except UnauthenticatedError as error:
        say(f"error: {error.message}; give a key with --api-key or SLUICE_API_KEY")
    except SluiceError as error:
        say(f"error: {error.reason}: {error.message}")
    except UserError as error:
        say(f"error: {error}")
    else:
        return
    sys.exit(1)


if __name__ == "__main__":
    main()
