"""An iteration that climbs from one precision to the next."""
