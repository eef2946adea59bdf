from kinfed.dossier.document import Verification as Verification
from kinfed.dossier.document import read_dossier as read_dossier
from kinfed.dossier.document import verify_dossier as verify_dossier
from kinfed.dossier.document import write_dossier as write_dossier
from kinfed.dossier.facts import collect_facts as collect_facts
from kinfed.dossier.threats import THREATS as THREATS
