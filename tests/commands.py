"""Commands of fineprune that tests run in their own process."""

from typer.testing import CliRunner

from fineprune.cli.main import app


def invoke(*arguments):
    """Run a command, and return its result."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def printed(*arguments):
    """Run a command that must succeed, and return what it printed."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout
