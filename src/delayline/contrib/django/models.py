"""No models: delayline has its tables itself. Django tells only apps with this module that it has migrated."""
