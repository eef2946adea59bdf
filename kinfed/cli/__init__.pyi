from kinfed.cli import display as display
from kinfed.cli.app import main as main
from kinfed.cli.parameters import integers as integers
from kinfed.cli.terminal import StopRequest as StopRequest
from kinfed.cli.terminal import console as console
from kinfed.cli.terminal import say as say
