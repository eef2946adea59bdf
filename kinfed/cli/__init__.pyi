from kinfed.cli.app import main as main
