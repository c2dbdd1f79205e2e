"""What transformers offers for generation but these models cannot do."""

from typing import Any, NoReturn

from contextready.errors import ContextReadyError


class WithoutContinuousBatching:
    """A model that refuses continuous batching: its paged cache has no room for z, and native blocks cannot read it."""

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to start."""
        raise ContextReadyError(
            f"{type(self).__name__} does not support continuous batching (generate_batch), which would give wrong "
            "text; call generate with a padded batch instead."
        )

    def continuous_batching_context_manager(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to start."""
        self.init_continuous_batching()

    def generate_batch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to start."""
        self.init_continuous_batching()

    def refuse_paged_cache(self, arguments: dict[str, Any]) -> None:
        """Refuse a forward of continuous batching, also if it was started in another way."""
        if arguments.get("cache") is not None:
            self.init_continuous_batching()
