-- keep result: store the result of a Job for whoever asks by its key. A later result takes its place.
-- ARGV: key, result, milliseconds for which it is kept.
call('SET', results_key(ARGV[1]), ARGV[2], 'PX', ARGV[3])
