-- cancel: all requests of the parent that have not ended end now, whoever owns them.
-- ARGV: parent.
begin(true)
end_parent(ARGV[1], 'cancelled')
publish()
