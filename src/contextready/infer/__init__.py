"""Generation: engines that stream, sampling, text as it comes, what it all costs."""
