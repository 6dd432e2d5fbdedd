"""Generate text: continue prompts token by token."""

from ligermodels.generation.draft import DraftModel as DraftModel
from ligermodels.generation.generate import generate as generate
from ligermodels.generation.generate import stream as stream
from ligermodels.generation.generate import stream_text as stream_text
from ligermodels.generation.many import generate_many as generate_many
from ligermodels.generation.sampling import Sampling as Sampling
