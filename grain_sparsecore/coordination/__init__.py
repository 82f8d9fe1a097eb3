"""Agreement between hosts: frames, protocol, transports and the coordinator."""

from grain_sparsecore.coordination.coordinator import Coordinator as Coordinator
from grain_sparsecore.coordination.pmax import PmaxReducer as PmaxReducer
from grain_sparsecore.coordination.pmax import process_reducer as process_reducer
from grain_sparsecore.coordination.reducers import LocalGroup as LocalGroup
from grain_sparsecore.coordination.reducers import Reducer as Reducer
from grain_sparsecore.coordination.reducers import (
    SingleProcessReducer as SingleProcessReducer,
)
