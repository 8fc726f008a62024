-- result: return the result of a Job by its key; false if there is none. It writes nothing.
-- ARGV: key.
return call('GET', results_key(ARGV[1]))
