"""The front ends that record a model: `record` for a block, `watch` for a model that is trained elsewhere.

Other packages use the names below: `record`, `watch` and `rows`; `Options` and the types of its fields;
`get_trainable`, the parameters that can be recorded; `find_parts` and `ModuleHook`, for hooks on the calls of a model;
`Guard` and `DeclaredBatches`, by which private training adds to a recording; and `is_recording`, `is_paused`,
`find_watch` and `leave_ended_modes`, which tell what is recorded at present.
"""

from persample.forward import CONTRIBUTIONS
from persample.recording.declared import DeclaredBatches, Guard
from persample.recording.hooks import ModuleHook, find_parts
from persample.recording.loss_rows import rows
from persample.recording.options import Constants, Coupled, Keep, Model, Options, Selection, Verify, get_trainable
from persample.recording.session import is_paused, is_recording, leave_ended_modes, record
from persample.recording.watching import Watch, find_watch, watch
