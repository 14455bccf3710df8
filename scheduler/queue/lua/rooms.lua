-- The rooms of the sessions that one pop names, and what it has taken of each.
local ROOM_SIZE = 9 -- arguments of one session
local rooms, largest_capacity = {}, 0

local function open_room(first, earmarked_until)
  local room = {
    session = ARGV[first], max_entries = {}, max_tokens = {}, capacity = tonumber(ARGV[first + 7]),
    max_charged = tonumber(ARGV[first + 8]), num_popped = 0, tokens_popped = 0, num_charged = 0
  }
  for rank = 0, NUM_CLASSES - 1 do
    room.max_entries[rank] = tonumber(ARGV[first + 1 + rank])
    room.max_tokens[rank] = tonumber(ARGV[first + 4 + rank])
  end
  largest_capacity = math.max(largest_capacity, room.capacity)
  local generation = call('HGET', EARMARKS, room.session)
  if generation then
    set_earmark(room.session, generation, earmarked_until)
    room.earmark, room.earmark_rank = generation, find(generation).rank
  end
  rooms[#rooms + 1] = room
end

-- Whether the session could take an entry of this class (exactly this one) if it were small enough.
local function is_open(room, rank, charged, generation)
  if room.num_popped >= room.max_entries[rank] or (charged == 1 and room.num_charged >= room.max_charged) then
    return false
  end
  return not room.earmark or rank < room.earmark_rank or room.earmark == generation
end

local function is_lane_open(rank, charged)
  for _, room in ipairs(rooms) do
    if is_open(room, rank, charged) then
      return true
    end
  end
  return false
end

local function tokens_left(room, rank)
  return room.max_tokens[rank] - room.tokens_popped
end

local function fits(room, generation, entry)
  return is_open(room, entry.rank, entry.charged, generation) and entry.max_tokens <= tokens_left(room, entry.rank)
end

-- The one with most tokens left, the first of equals, of the rooms that `is_able` accepts.
local function roomiest(rank, is_able)
  local best
  for _, room in ipairs(rooms) do
    if is_able(room) and (not best or tokens_left(room, rank) > tokens_left(best, rank)) then
      best = room
    end
  end
  return best
end
