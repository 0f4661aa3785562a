"""Lists the commands."""

from mtf_experiments import cli
from mtf_experiments.errors import UserError


def main(argv: list[str]) -> None:
    """Print the list of commands; the package itself takes no arguments but `--help`."""
    if argv and argv[0] not in ("-h", "--help"):
        hint = f"; write python -m mtf_experiments.{argv[0]}" if argv[0] in cli.COMMANDS else ""
        raise UserError(f"python -m mtf_experiments takes no argument {argv[0]!r}{hint}\n{cli.list_commands()}")
    print(cli.list_commands())


if __name__ == "__main__":
    cli.run(main)
