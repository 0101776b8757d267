"""Training: the step, optimizer and schedules, exact resume, callbacks, loggers, and the run that ties all together."""
