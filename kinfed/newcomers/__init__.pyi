from kinfed.newcomers.adoption import adopt as adopt
from kinfed.newcomers.adoption import as_pipeline as as_pipeline
from kinfed.newcomers.adoption import learn_alone as learn_alone
from kinfed.newcomers.finished import FinishedRun as FinishedRun
from kinfed.newcomers.finished import RunInMemory as RunInMemory
from kinfed.newcomers.finished import newcomer_from_table as newcomer_from_table
from kinfed.newcomers.forgetting import Forgotten as Forgotten
from kinfed.newcomers.forgetting import forget as forget
