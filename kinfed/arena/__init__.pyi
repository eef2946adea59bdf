from kinfed.arena.plan import StudyPlan as StudyPlan
from kinfed.arena.studies import StudyResult as StudyResult
from kinfed.arena.studies import open_study as open_study
from kinfed.arena.studies import study as study
