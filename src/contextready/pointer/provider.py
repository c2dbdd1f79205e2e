"""What runs ask of this task: its settings, and where its sequences come from."""

from contextready.pointer.source import PointerSource
from contextready.pointer.task import PointerTask

SETTINGS = PointerTask
open_source = PointerSource
